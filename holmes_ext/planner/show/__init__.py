"""Output of `holmes plan`: tables, JSON and the HTML page of its results."""
