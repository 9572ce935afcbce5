"""The longest files first, so that two processes (`make test`) end at the same time."""

LONGEST = ("local/test_run.py", "rehearsal/test_rehearsal.py", "local/test_quantized.py", "local/test_rollout.py",
           "local/test_megatron.py", "test_box.py", "local/test_routing.py", "local/test_evaluate.py",
           "local/test_hardware_error.py")


def pytest_collection_modifyitems(items):
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.as_posix().rpartition("/tests/")[2], len(LONGEST)))
