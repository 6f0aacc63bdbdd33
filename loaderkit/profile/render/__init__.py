"""Renders one report: as text, as HTML, as a trace."""
