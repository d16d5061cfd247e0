-- What a session is found by besides its whole conversation: its last question and answer, and the tool calls of its last
-- turn. Each number stands for tenant, user and key, as `talk` does. Without the pending list, which every look-up would
-- have to read.
ALTER TABLE tenure_head ADD COLUMN matches bigint[];
CREATE INDEX tenure_head_matches ON tenure_head USING gin (matches) WITH (fastupdate = off) WHERE matches IS NOT NULL;
