"""Child processes: a kernel that crashes, hangs or eats the memory becomes a Verdict."""
