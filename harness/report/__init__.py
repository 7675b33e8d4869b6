"""Listeners that show a campaign's events to people and machines."""
