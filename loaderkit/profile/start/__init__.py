"""Reports on a start: what it waited for, and which of that another part hid."""
