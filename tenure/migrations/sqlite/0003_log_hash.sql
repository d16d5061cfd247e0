-- Format 3. The running hash over the records of a session's log (64 bits, with a sign), which a commit is conditional on:
-- sequence numbers alone do not tell two logs of the same length apart. NULL for sessions of older formats.
alter table head add column log integer;
