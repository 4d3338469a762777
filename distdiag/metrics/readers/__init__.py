"""Readers of what runs leave behind: one module for each family of formats."""
