"""How one rank writes down what is observed, and how others read it."""
