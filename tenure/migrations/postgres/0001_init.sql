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
    position int, -- of a message in the message index: the number of messages before it
    tenant   text COLLATE "C" NOT NULL,
    session  text COLLATE "C" NOT NULL,
    entry    text COLLATE "C" NOT NULL,
    words    int[], -- of a message in the message index: hashes of tenant and word, and of tenant and user
    PRIMARY KEY (tenant, session, seq)
);

-- The message index. Its pending list is small, because every search reads it.
CREATE INDEX tenure_record_words ON tenure_record USING gin (words) WITH (gin_pending_list_limit = 256)
    WHERE words IS NOT NULL;

-- The state of the message index, in one row. Commits only read it, unless they change it.
CREATE TABLE tenure_message_index (
    id           int PRIMARY KEY CHECK (id = 1),
    after_key    boolean NOT NULL, -- whether the session with this key is in the index itself
    rules        bigint, -- hash of the rules by which words are computed; NULL: nothing was indexed
    from_tenant  text COLLATE "C", -- the sessions from this key on are not in the index; NULL: all are
    from_session text COLLATE "C"
);
INSERT INTO tenure_message_index (id, after_key) VALUES (1, false);

-- Checkpoints and rewinds, for the view workflow_checkpoints. Other records are not in them, so appending a message
-- costs only the two comparisons.
CREATE INDEX tenure_record_checkpoint ON tenure_record (tenant, session, seq)
    WHERE starts_with(entry, '{"checkpoint":');
CREATE INDEX tenure_record_rewound ON tenure_record (tenant, session, seq)
    WHERE starts_with(entry, '{"rewound":');

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
-- PostgreSQL stores JSON that contains \u0000, but fails to read inside it. A message is therefore extracted as text:
-- it is the last field of its entry, and the name of that field is unambiguous, because a quote inside an earlier string
-- would be preceded by a backslash. Everything else is read with tenure_jsonb.

-- Returns JSON text as jsonb, with \ufffd for every \u0000. What jsonb rejects for another reason becomes a string.
CREATE FUNCTION tenure_jsonb(json_text text) RETURNS jsonb LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $$
BEGIN
    IF strpos(json_text, '\u0000') > 0 THEN
        RETURN regexp_replace(json_text, '(?<!\\)((?:\\\\)*)\\u0000', '\1\\ufffd', 'g')::jsonb;
    END IF;
    RETURN json_text::jsonb;
EXCEPTION WHEN data_exception THEN
    RETURN to_jsonb(json_text);
END
$$;

-- Applies a JSON merge patch (RFC 7396).
CREATE FUNCTION tenure_merge_patch(target jsonb, patch jsonb) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE SET search_path FROM CURRENT AS $$
DECLARE
    merged jsonb := CASE WHEN jsonb_typeof(target) = 'object' THEN target ELSE '{}' END;
    field record;
BEGIN
    IF jsonb_typeof(patch) IS DISTINCT FROM 'object' THEN
        RETURN patch;
    END IF;
    FOR field IN SELECT key, value FROM jsonb_each(patch) LOOP
        IF jsonb_typeof(field.value) = 'null' THEN
            merged := merged - field.key;
        ELSE
            merged := merged || jsonb_build_object(field.key, tenure_merge_patch(merged -> field.key, field.value));
        END IF;
    END LOOP;
    RETURN merged;
END
$$;

-- The segments of a session's log: its own records, and those of its ancestors up to the fork points. A function,
-- because the planner takes a recursive query for a hundred rows, and then reads the records of all sessions.
CREATE FUNCTION tenure_log_segments(of_tenant text, of_session text, end_seq bigint, ancestor text, fork_point bigint)
RETURNS TABLE (source text, last_seq bigint) LANGUAGE plpgsql STABLE ROWS 1 SET search_path FROM CURRENT AS $$
BEGIN
    source := of_session;
    last_seq := end_seq;
    LOOP
        RETURN NEXT;
        EXIT WHEN ancestor IS NULL;
        last_seq := least(last_seq, fork_point);
        SELECT h.session, h.parent, h.parent_seq INTO source, ancestor, fork_point
        FROM tenure_head h WHERE h.tenant = of_tenant AND h.session = ancestor;
        EXIT WHEN NOT FOUND;
    END LOOP;
END
$$;

CREATE VIEW tenure_log_segment AS
SELECT h.tenant, h.session, segment.source, segment.last_seq
FROM tenure_head h
CROSS JOIN LATERAL tenure_log_segments(h.tenant, h.session, h.seq, h.parent, h.parent_seq) segment
WHERE h.status IN ('active', 'paused');

-- The full log of each session. Here and below, OFFSET 0 makes the records of each segment a lookup by the whole key:
-- without statistics, the planner may take the tenant alone for selective enough.
CREATE VIEW tenure_full_log AS
SELECT s.tenant, s.session, r.seq, r.at, r.entry
FROM tenure_log_segment s
CROSS JOIN LATERAL (
    SELECT seq, at, entry FROM tenure_record
    WHERE tenant = s.tenant AND session = s.source AND seq <= s.last_seq
    OFFSET 0
) r;

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
           min(CASE WHEN starts_with(entry, '{"rewound":') THEN (tenure_jsonb(entry) #>> '{rewound,to}')::bigint END)
               OVER (PARTITION BY tenant, session ORDER BY seq DESC) AS lowest_rewind
    FROM tenure_full_log l
) log
WHERE lowest_rewind IS NULL OR lowest_rewind >= seq;

-- The metadata of a session at a record, as the library folds it: `created` begins it, `info` patches it, and the
-- decisions of reviews are only those in the log.
CREATE FUNCTION tenure_metadata_at(of_tenant text, of_session text, upto bigint) RETURNS jsonb
LANGUAGE plpgsql STABLE SET search_path FROM CURRENT AS $$
DECLARE
    metadata jsonb := '{}';
    decisions jsonb;
    log record;
    fields jsonb;
BEGIN
    FOR log IN
        SELECT l.at, tenure_jsonb(l.entry) AS entry FROM tenure_full_log l
        WHERE l.tenant = of_tenant AND l.session = of_session AND l.seq <= upto
            AND (starts_with(l.entry, '{"created":') OR starts_with(l.entry, '{"info":')
                OR starts_with(l.entry, '{"review_decided":'))
        ORDER BY l.seq
    LOOP
        IF log.entry ? 'created' THEN
            fields := log.entry -> 'created';
            metadata := coalesce(fields -> 'metadata', '{}');
            decisions := CASE WHEN fields ? 'parent' THEN metadata -> 'hitl_decisions' END;
        ELSIF log.entry ? 'info' THEN
            metadata := tenure_merge_patch(metadata, coalesce(log.entry #> '{info,metadata}', '{}'));
        ELSE
            fields := log.entry -> 'review_decided';
            decisions := CASE WHEN jsonb_typeof(decisions) = 'array' THEN decisions ELSE '[]' END
                || jsonb_build_array(jsonb_strip_nulls(jsonb_build_object(
                    'step', fields -> 'step',
                    'decision', fields -> 'decision',
                    'reviewer', fields -> 'reviewer',
                    'timestamp', rtrim(rtrim(to_char(
                        (timestamptz 'epoch' + log.at * interval '1 microsecond') AT TIME ZONE 'UTC',
                        'YYYY-MM-DD"T"HH24:MI:SS.US'), '0'), '.') || 'Z',
                    'notes', fields -> 'notes')));
        END IF;
    END LOOP;
    metadata := metadata - 'hitl_decisions';
    RETURN CASE WHEN decisions IS NULL THEN metadata
                ELSE metadata || jsonb_build_object('hitl_decisions', decisions) END;
END
$$;

-- The state of a session at a visible checkpoint. Neither the checkpoint nor any message before it was discarded: the
-- messages before it now are those before it when it was created. It reads the session's log, so its cost keeps the
-- planner from computing it for rows that a LIMIT removes.
CREATE FUNCTION tenure_checkpoint_state(of_tenant text, of_session text, at_seq bigint, entry text) RETURNS jsonb
LANGUAGE sql STABLE COST 1000 SET search_path FROM CURRENT AS $$
    WITH message AS MATERIALIZED (
        SELECT position AS ord,
               tenure_jsonb(substr(v.entry, body_at + 7, length(v.entry) - body_at - 8)) AS body
        FROM (SELECT *, strpos(r.entry, '"body":') AS body_at FROM tenure_visible_record r
              WHERE r.tenant = of_tenant AND r.session = of_session) v
        WHERE v.is_message AND v.seq < at_seq
    ), result AS MATERIALIZED (
        SELECT ord, body ->> 'tool_call_id' AS call_id, body -> 'content' AS content
        FROM message WHERE body ->> 'role' = 'tool'
    ), call AS (
        SELECT m.ord, item.n, item.call
        FROM message m
        CROSS JOIN LATERAL jsonb_array_elements(
            CASE WHEN jsonb_typeof(m.body -> 'tool_calls') = 'array' THEN m.body -> 'tool_calls' ELSE '[]' END
        ) WITH ORDINALITY AS item (call, n)
        WHERE m.body ->> 'role' = 'assistant'
    )
    SELECT jsonb_build_object(
        'label', c.fields -> 'label',
        'position', (SELECT count(*) FROM message),
        'messages', (SELECT coalesce(jsonb_agg(body ORDER BY ord), '[]') FROM message),
        'pending_tool_calls', (
            SELECT coalesce(jsonb_agg(call.call ORDER BY call.ord, call.n), '[]') FROM call
            WHERE NOT EXISTS (SELECT FROM result r WHERE r.call_id = call.call ->> 'id' AND r.ord > call.ord)
        ),
        'tool_results', (
            SELECT coalesce(
                jsonb_agg(jsonb_build_object('tool_call_id', call_id, 'content', content) ORDER BY ord), '[]')
            FROM result
        ),
        'metadata', tenure_metadata_at(of_tenant, of_session, at_seq),
        'state', coalesce(c.fields -> 'state', '{}')
    )
    FROM (SELECT tenure_jsonb(entry) -> 'checkpoint' AS fields) c
$$;

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
       timestamptz 'epoch' + at * interval '1 microsecond' AS created_at,
       coalesce((fields ->> 'auto')::boolean, false) AS auto,
       tenant
FROM (SELECT *, tenure_jsonb(entry) -> 'checkpoint' AS fields FROM tenure_visible_record WHERE is_checkpoint) c;

-- The runs of each session. A fork does not continue its parent's runs: one that had not ended at the fork point was
-- cancelled by the fork. Whether an open run waits is in the head of its session.
CREATE VIEW runs AS
SELECT id, session AS session_id,
       CASE WHEN outcome IS NOT NULL THEN outcome
            WHEN forked_at IS NOT NULL THEN 'cancelled'
            ELSE (
                SELECT CASE WHEN head ? 'reviews' OR head ->> 'run' = run.id AND head #> '{pause,until}' IS NOT NULL
                            THEN 'paused'
                            WHEN coalesce(head #>> '{lease,node}', '') = '' THEN 'queued'
                            ELSE 'running' END
                FROM (SELECT tenure_jsonb(h.head_json) AS head FROM tenure_head h
                      WHERE h.tenant = run.tenant AND h.session = run.session) h
            ) END AS status,
       timestamptz 'epoch' + started_at * interval '1 microsecond' AS started_at,
       timestamptz 'epoch' + coalesce(ended_at, forked_at) * interval '1 microsecond' AS ended_at,
       error, code, tenant
FROM (
    SELECT tenant, session, id,
           min(at) FILTER (WHERE is_start) AS started_at,
           min(forked_at) FILTER (WHERE is_start) AS forked_at,
           max(at) FILTER (WHERE NOT is_start) AS ended_at,
           max(fields ->> 'outcome') AS outcome,
           max(fields ->> 'error') AS error,
           max(fields ->> 'code') AS code
    FROM (
        SELECT tenant, session, at, forked_at, is_start, fields, fields ->> 'run' AS id
        FROM (
            SELECT tenant, session, at, starts_with(entry, '{"run_started":') AS is_start,
                   min(CASE WHEN starts_with(entry, '{"created":') THEN at END)
                       OVER (PARTITION BY tenant, session ORDER BY seq DESC) AS forked_at,
                   CASE WHEN starts_with(entry, '{"run_started":') THEN tenure_jsonb(entry) -> 'run_started'
                        WHEN starts_with(entry, '{"run_ended":') THEN tenure_jsonb(entry) -> 'run_ended' END AS fields
            FROM tenure_full_log
        ) log
        WHERE fields IS NOT NULL
    ) run_record
    GROUP BY tenant, session, id
) run
WHERE started_at IS NOT NULL;

-- A checkpoint with the session's state at it. Unlike the views above, it finds the checkpoints of a session in an
-- index, and reads the session's log only for the states that a query returns. The scalar subquery is looked up for
-- each checkpoint; NOT EXISTS could become a join with the rewinds of all sessions.
CREATE VIEW workflow_checkpoints AS
SELECT md5(s.tenant || '/' || s.session || '/' || c.seq)::uuid AS id,
       s.session AS session_id,
       tenure_jsonb(c.entry) #>> '{checkpoint,run}' AS run_id,
       tenure_checkpoint_state(s.tenant, s.session, c.seq, c.entry) AS state,
       -- Without the condition, a checkpoint without a step would have the largest one: LEAST ignores NULL.
       CASE WHEN tenure_jsonb(c.entry) #> '{checkpoint,step}' IS NOT NULL
            THEN least((tenure_jsonb(c.entry) #>> '{checkpoint,step}')::numeric, 2147483647)::int END AS step_index,
       timestamptz 'epoch' + c.at * interval '1 microsecond' AS created_at,
       timestamptz 'epoch' + c.at * interval '1 microsecond' AS updated_at,
       s.tenant
FROM tenure_log_segment s
CROSS JOIN LATERAL (
    SELECT seq, at, entry FROM tenure_record
    WHERE tenant = s.tenant AND session = s.source AND seq <= s.last_seq AND starts_with(entry, '{"checkpoint":')
    OFFSET 0
) c
WHERE coalesce((
    SELECT min((tenure_jsonb(w.entry) #>> '{rewound,to}')::bigint)
    FROM tenure_log_segment t
    CROSS JOIN LATERAL (
        SELECT entry FROM tenure_record
        WHERE tenant = t.tenant AND session = t.source AND seq > c.seq AND seq <= t.last_seq
            AND starts_with(entry, '{"rewound":')
        OFFSET 0
    ) w
    WHERE t.tenant = s.tenant AND t.session = s.session
), c.seq) >= c.seq;
