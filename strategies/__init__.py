"""Strategies of Cases, built within a kernel's capabilities."""
