"""The run: draw a case, try it, judge it, shrink it, keep it, report it."""
