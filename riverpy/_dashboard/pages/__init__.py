"""The pages of the dashboard, one module for each. `app.py` lists them."""
