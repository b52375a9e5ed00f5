"""The host shell: requests, queues, clocks and the compiled steps. It alone has mutable objects."""
