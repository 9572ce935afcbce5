"""CANN's acl for Python, as far as a count of devices needs it. The box adds COUNT and ERROR."""
# ruff: noqa: F821


class rt:
    @staticmethod
    def get_device_count():
        return (0, ERROR) if ERROR else (COUNT, 0)
