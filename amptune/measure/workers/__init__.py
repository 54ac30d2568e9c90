"""Worker processes: started, given tasks, replaced."""
