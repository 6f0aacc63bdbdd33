"""One report as text, as HTML, as a trace."""
