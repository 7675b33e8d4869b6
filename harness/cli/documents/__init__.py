"""The JSON that commands print, and what a check of a function returns, as types: a module for each group of commands."""
