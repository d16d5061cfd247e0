-- The running hash over the records of a session's log (64 bits, with a sign), which a commit is conditional on: sequence
-- numbers alone do not tell two logs of the same length apart, and a database that was restored, or that lost commits in
-- an asynchronous failover, may have another one than a running node remembers. NULL for sessions of older formats. It is
-- true here and only here, like the lineage: nodes of the version before do not write it.
ALTER TABLE tenure_head ADD COLUMN log bigint;
