"""The NICs of a node, from /sys or from a tree captured on another machine: node.py puts together what the others read."""
