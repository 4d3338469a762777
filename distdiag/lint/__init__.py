"""``distdiag lint``: what can be seen in the source, before anything runs."""
