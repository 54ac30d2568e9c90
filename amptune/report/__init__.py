"""What people look at: results on a terminal, a page of HTML, explanations in words."""
