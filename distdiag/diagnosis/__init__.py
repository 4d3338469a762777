"""What a folder of artifacts says on why a run is wrong.

A context names artifacts, symptoms and limits. Rules turn what the artifacts hold into clues, clues
of one issue are weighed together, and what they carry is called a cause.
"""
