"""Process groups: how each is created on its planned network, and the messages between pipeline stages."""
