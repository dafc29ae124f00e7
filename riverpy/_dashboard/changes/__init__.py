"""The forms of the dashboard that change something. Each module has the forms of one subject, such
as queues. `app.py` lists the forms."""
