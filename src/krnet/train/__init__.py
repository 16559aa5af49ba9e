"""The one loop that steps, stops, saves and resumes, and what trains in it."""
