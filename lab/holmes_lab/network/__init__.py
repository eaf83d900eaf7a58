"""The emulated network: namespaces, links, rates, and measuring them."""
