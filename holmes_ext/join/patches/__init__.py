"""Patches by which training frameworks' jobs join other jobs and read their part of a data set."""
