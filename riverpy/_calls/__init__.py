"""The methods of `Client`. Each module has the methods for one subject, such as jobs, queues or
events."""
