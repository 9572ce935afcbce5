"""The longest files first: `make test` divides files among two processes, and none should be left for the end."""

LONGEST = ("test_run", "test_launchers", "test_sweep", "test_megatron", "test_rehearsal", "test_preflight",
           "test_rollout", "test_quantized")


def pytest_collection_modifyitems(items):
    def place(item):
        name = item.path.stem
        return LONGEST.index(name) if name in LONGEST else len(LONGEST)

    items.sort(key=place)
