"""Three regions on one machine: network namespaces, lines with a delay between them, and what runs in each."""
