"""The forms in which a report is shown: one module for each, found by its name."""
