"""Code that waits until jobs have ended, and the connection on which waits and subscriptions
listen."""
