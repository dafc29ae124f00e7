"""The measurements that `riverpy bench` makes."""
