"""Results for people: on a terminal, as a page of HTML, as explanations in words."""
