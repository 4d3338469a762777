"""A notebook of an investigation: the symptom, hypotheses, and experiments with one change each."""
