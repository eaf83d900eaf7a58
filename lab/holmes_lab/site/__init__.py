"""Folder that the lab puts on PYTHONPATH of jobs with emulated hardware.

Python imports the module sitecustomize from there when it starts. The folder is a package only so
that wheels contain it.
"""
