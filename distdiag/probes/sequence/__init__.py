"""Observe attention over sequences that ranks share."""
