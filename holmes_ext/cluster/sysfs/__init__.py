"""The NICs of a node, from /sys or a tree captured on another machine: node.py joins what the others read."""
