"""Commands of `holmes`, each in a module of its own."""
