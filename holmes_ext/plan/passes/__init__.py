"""Schedules whose backward pass is split: lists of passes for each stage, found, bounded, followed."""
