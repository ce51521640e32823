"""From runs to tables: records, statistics, renderers, and the quickstart."""
