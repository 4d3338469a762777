"""How torch and Python are patched: the one way that all probes use."""
