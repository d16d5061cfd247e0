-- Sessions, their logs, items and media.
--
-- Key columns compare byte by byte (COLLATE "C"): cheaper, the same on every server, and the order that the library
-- promises. Columns of fixed width come first, so that no row has padding. Times are microseconds since 1970.

-- The head of a session. `head_json` is the complete head as JSON text; the other columns serve queries, except for the
-- lineage (first_seq, parent, parent_seq, parent_digest) and log_hash, for which the columns are authoritative: a purge
-- changes the lineage under writers that have cached the head.
CREATE TABLE tenure_head (
    seq              bigint NOT NULL, -- the last record
    first_seq        bigint NOT NULL, -- the first own record
    created_at       bigint NOT NULL,
    active_at        bigint NOT NULL,
    due_at           bigint,
    lease_until      bigint,
    parent_seq       bigint,
    conversation_key bigint NOT NULL, -- digest of tenant, user and visible_hash
    log_hash         bigint NOT NULL, -- running hash over the records (64 bits, signed); a commit is conditional on it
    tenant           text COLLATE "C" NOT NULL,
    session          text COLLATE "C" NOT NULL,
    "user"           text COLLATE "C" NOT NULL,
    status           text COLLATE "C" NOT NULL,
    visible_hash     bytea NOT NULL,
    assistant        text COLLATE "C",
    thread           text COLLATE "C",
    parent           text COLLATE "C",
    parent_digest    text COLLATE "C",
    title            text COLLATE "C" NOT NULL, -- folded
    labels           text[] COLLATE "C", -- NULL for none, which keeps most heads out of the index
    match_keys       bigint[], -- digests of tenant, user and each match key; NULL for none
    head_json        text COLLATE "C" NOT NULL,
    PRIMARY KEY (tenant, session)
) WITH (
    fillfactor = 70, -- every commit rewrites its head: room for the new version beside the old one
    autovacuum_vacuum_scale_factor = 0.02 -- and leaves the old version in the indexes: a small table, vacuumed often
);

-- Lists are in the order of active_at, which every commit changes. The indexes have it in slots of about a minute
-- (2^26 microseconds): equal entries are deduplicated, which halves what a busy session leaves in them. A list sorts
-- the few sessions of a slot itself.
--
-- The condition is always true, and only lists state it. Without it, a server that has no statistics yet may use these
-- indexes to look up a single session, scanning all sessions of its tenant, and keep that plan.
CREATE INDEX tenure_head_user ON tenure_head (tenant, "user", (active_at >> 26)) WHERE first_seq > 0;
CREATE INDEX tenure_head_active ON tenure_head (tenant, (active_at >> 26)) WHERE first_seq > 0;
CREATE INDEX tenure_head_labels ON tenure_head USING gin (labels) WHERE labels IS NOT NULL;
CREATE INDEX tenure_head_parent ON tenure_head (tenant, parent) WHERE parent IS NOT NULL;
CREATE INDEX tenure_head_due ON tenure_head (due_at) WHERE due_at IS NOT NULL;
CREATE INDEX tenure_head_lease ON tenure_head (lease_until) WHERE lease_until IS NOT NULL;
CREATE INDEX tenure_head_status ON tenure_head (status) WHERE status <> 'active'; -- for counts
-- Only a prefix, because the name of a thread may exceed the size of a B-tree entry.
CREATE INDEX tenure_head_thread ON tenure_head (left(thread, 200)) WHERE thread IS NOT NULL;
-- For content matching. The hash changes with each turn and leaves an entry behind: the key is as small as possible.
CREATE INDEX tenure_head_conversation ON tenure_head (conversation_key);
-- Without the pending list, which every lookup would have to read.
CREATE INDEX tenure_head_match_keys ON tenure_head USING gin (match_keys) WITH (fastupdate = off)
    WHERE match_keys IS NOT NULL;

-- The index of labels. A trigger keeps it equal to tenure_head.labels; an append that leaves the labels unchanged
-- writes nothing here.
CREATE TABLE tenure_head_label (
    tenant  text COLLATE "C" NOT NULL,
    label   text COLLATE "C" NOT NULL,
    session text COLLATE "C" NOT NULL,
    PRIMARY KEY (tenant, label, session)
);

CREATE FUNCTION tenure_head_label_sync() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    IF TG_OP <> 'INSERT' AND OLD.labels IS NOT NULL THEN
        DELETE FROM tenure_head_label WHERE tenant = OLD.tenant AND label = ANY(OLD.labels) AND session = OLD.session;
    END IF;
    IF TG_OP <> 'DELETE' AND NEW.labels IS NOT NULL THEN
        INSERT INTO tenure_head_label (tenant, label, session)
            SELECT NEW.tenant, label, NEW.session FROM unnest(NEW.labels) AS label ON CONFLICT DO NOTHING;
    END IF;
    RETURN NULL;
END
$$;

CREATE TRIGGER tenure_head_label_insert AFTER INSERT ON tenure_head
    FOR EACH ROW WHEN (NEW.labels IS NOT NULL) EXECUTE FUNCTION tenure_head_label_sync();
CREATE TRIGGER tenure_head_label_update AFTER UPDATE OF labels ON tenure_head
    FOR EACH ROW WHEN (OLD.labels IS DISTINCT FROM NEW.labels) EXECUTE FUNCTION tenure_head_label_sync();
CREATE TRIGGER tenure_head_label_delete AFTER DELETE ON tenure_head
    FOR EACH ROW WHEN (OLD.labels IS NOT NULL) EXECUTE FUNCTION tenure_head_label_sync();

-- The log. `entry` is text, never jsonb, which rejects \u0000, rewrites numbers and loses the order of keys. Its
-- storage is left at EXTENDED: a row below 2 kB is stored as it is, beyond that the text is compressed.
CREATE TABLE tenure_record (
    seq      bigint NOT NULL,
    at       bigint NOT NULL,
    checksum int NOT NULL, -- CRC-32 over seq, time and entry (signed)
    tenant   text COLLATE "C" NOT NULL,
    session  text COLLATE "C" NOT NULL,
    entry    text COLLATE "C" NOT NULL,
    PRIMARY KEY (tenant, session, seq)
);

-- Items of namespaces. `words` are the words of `text`, as the library splits and folds them.
CREATE TABLE tenure_item (
    created_at bigint NOT NULL,
    used_at    bigint NOT NULL,
    uses       bigint NOT NULL,
    expires_at bigint,
    tenant     text COLLATE "C" NOT NULL,
    owner      text COLLATE "C" NOT NULL,
    namespace  text COLLATE "C" NOT NULL,
    key        text COLLATE "C" NOT NULL,
    value      text COLLATE "C" NOT NULL,
    text       text COLLATE "C",
    words      tsvector,
    PRIMARY KEY (tenant, owner, namespace, key)
) WITH (fillfactor = 90); -- updates of the use count stay on their page

CREATE INDEX tenure_item_words ON tenure_item USING gin (words) WHERE words IS NOT NULL;
CREATE INDEX tenure_item_expires ON tenure_item (expires_at) WHERE expires_at IS NOT NULL;

-- Media, once per tenant.
CREATE TABLE tenure_blob (
    tenant text COLLATE "C" NOT NULL,
    id     bytea NOT NULL,
    bytes  bytea NOT NULL,
    PRIMARY KEY (tenant, id)
);
-- Media are compressed already.
ALTER TABLE tenure_blob ALTER COLUMN bytes SET STORAGE EXTERNAL;

-- The references of sessions to blobs, with the first record that needs them. The foreign key resolves the race between
-- a commit that begins to use a blob and a purge that removes it: one of the two fails and is retried.
CREATE TABLE tenure_blob_ref (
    first_seq bigint NOT NULL,
    tenant    text COLLATE "C" NOT NULL,
    session   text COLLATE "C" NOT NULL,
    blob_id   bytea NOT NULL,
    PRIMARY KEY (tenant, session, blob_id),
    FOREIGN KEY (tenant, blob_id) REFERENCES tenure_blob (tenant, id)
);
CREATE INDEX tenure_blob_ref_blob ON tenure_blob_ref (blob_id, tenant);

-- Views of active and paused sessions. Written so that conditions on tenant and session are pushed down to the tables:
-- the ancestors of each session are looked up one by one, and every window is one session.
--
-- PostgreSQL stores JSON that contains \u0000, but fails to read inside it. What may contain it (messages, the state
-- of a checkpoint) is therefore extracted as text: it is the last field of its entry, and its name is unambiguous,
-- because a quote inside an earlier string would be preceded by a backslash.

-- The full log of each session: its own records, and those of its ancestors up to the fork points.
CREATE VIEW tenure_full_log AS
SELECT h.tenant, h.session, r.seq, r.at, r.entry
FROM tenure_head h
CROSS JOIN LATERAL (
    WITH RECURSIVE segment (session, last_seq, parent, parent_seq) AS (
        SELECT h.session, h.seq, h.parent, h.parent_seq
        UNION ALL
        SELECT a.session, least(s.last_seq, s.parent_seq), a.parent, a.parent_seq
        FROM segment s JOIN tenure_head a ON a.tenant = h.tenant AND a.session = s.parent
    )
    SELECT session, last_seq FROM segment
) segment
JOIN tenure_record r ON r.tenant = h.tenant AND r.session = segment.session AND r.seq <= segment.last_seq
WHERE h.status IN ('active', 'paused');

-- The records that no later rewind has discarded. `position` is the number of messages before a record.
CREATE VIEW tenure_visible_record AS
SELECT tenant, session, seq, at, entry, is_message, is_checkpoint,
       count(*) FILTER (WHERE is_message) OVER (
           PARTITION BY tenant, session ORDER BY seq ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
       ) AS position
FROM (
    SELECT l.*,
           starts_with(entry, '{"message":') AS is_message,
           starts_with(entry, '{"checkpoint":') AS is_checkpoint,
           min(CASE WHEN starts_with(entry, '{"rewound":') THEN (entry::json #>> '{rewound,to}')::bigint END)
               OVER (PARTITION BY tenant, session ORDER BY seq DESC) AS lowest_rewind
    FROM tenure_full_log l
) log
WHERE lowest_rewind IS NULL OR lowest_rewind >= seq;

-- Visible checkpoints, with their fields.
CREATE VIEW tenure_visible_checkpoint AS
SELECT tenant, session, seq, position,
       timestamptz 'epoch' + at * interval '1 microsecond' AS created_at,
       CASE WHEN state_at = 0 THEN entry ELSE left(entry, state_at - 1) || '}}' END::json -> 'checkpoint' AS fields,
       CASE WHEN state_at = 0 THEN '{}'
            ELSE substr(entry, state_at + 9, length(entry) - state_at - 10) END::json AS state
FROM (SELECT *, strpos(entry, ',"state":{') AS state_at FROM tenure_visible_record WHERE is_checkpoint) c;

-- Public views: their columns are documented.

-- In the info of a session, \u0000 is shown as \ufffd.
CREATE VIEW sessions AS
SELECT session AS session_id,
       head_json -> 'info' AS info_json,
       (head_json #>> '{info,updated_at}')::timestamptz AS updated_at,
       tenant
FROM (
    SELECT tenant, session,
           CASE WHEN strpos(head_json, '\u0000') = 0 THEN head_json
                ELSE regexp_replace(head_json, '(?<!\\)((?:\\\\)*)\\u0000', '\1\\ufffd', 'g') END::json AS head_json
    FROM tenure_head
    WHERE status IN ('active', 'paused')
) head;

CREATE VIEW messages AS
SELECT session AS session_id, position AS ord,
       substr(entry, body_at + 7, length(entry) - body_at - 8)::json AS message_json, tenant
FROM (SELECT *, strpos(entry, '"body":') AS body_at FROM tenure_visible_record WHERE is_message) message;

CREATE VIEW checkpoints AS
SELECT session AS session_id,
       fields ->> 'label' AS label,
       position,
       created_at,
       coalesce((fields ->> 'auto')::boolean, false) AS auto,
       tenant
FROM tenure_visible_checkpoint;

-- A checkpoint with the session's state at it. A visible checkpoint was never discarded, nor was any message before it:
-- the messages before it now are those before it when it was created.
CREATE VIEW workflow_checkpoints AS
SELECT md5(tenant || '/' || session || '/' || seq)::uuid AS id,
       session AS session_id,
       fields ->> 'run' AS run_id,
       json_build_object(
           'messages', coalesce(
               (SELECT json_agg(m.message_json ORDER BY m.ord) FROM messages m
                WHERE m.tenant = c.tenant AND m.session_id = c.session AND m.ord < c.position),
               '[]'::json),
           'state', state,
           'label', fields -> 'label',
           'position', position
       ) AS state,
       -- Without the condition, a checkpoint without a step would have the largest one: LEAST ignores NULL.
       CASE WHEN fields ->> 'step' IS NOT NULL
            THEN least((fields ->> 'step')::numeric, 2147483647)::int END AS step_index,
       created_at,
       created_at AS updated_at,
       tenant
FROM tenure_visible_checkpoint c;
