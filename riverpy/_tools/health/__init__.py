"""The health server of a worker: probes, metrics and events, and systemd's notifications."""
