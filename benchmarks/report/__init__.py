"""Reports: run records to tables, figures and the HTML page."""
