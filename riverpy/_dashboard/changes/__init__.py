"""The forms of the dashboard that change something, by subject. `app.py` lists them."""
