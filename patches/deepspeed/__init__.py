"""Patches (changes of holmes while a job runs) to DeepSpeed."""
