"""The methods of `Client` on jobs, queues, periodic jobs and executions."""
