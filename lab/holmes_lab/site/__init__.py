"""On PYTHONPATH for Python to import sitecustomize at start-up; a package so that wheels contain it."""
