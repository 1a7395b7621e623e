"""The page at `/`: plain modules in `static/`, and what they ask the edge for."""
