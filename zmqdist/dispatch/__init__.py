"""The broker and the workers: `DispatchServer`, `WorkerServer`, and what runs functions in threads and processes."""
