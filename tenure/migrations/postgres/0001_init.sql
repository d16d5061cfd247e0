-- Sessions, their logs, items and media. Never edited once released: a change is a new file.
--
-- Key columns compare byte by byte (COLLATE "C"): cheaper, the same on every server, and the order that the library
-- promises. Columns of fixed width come first, so that no row has padding. Times are microseconds since 1970.

-- The index card of a session. `card` is the whole card as JSON text; the other columns serve queries, apart from
-- the lineage (first, parent, parent_seq, parent_mark): that is true here and only here, since a purge changes it
-- under writers that remember the card as it was.
CREATE TABLE tenure_head (
    seq         bigint NOT NULL,
    first       bigint NOT NULL,
    created_at  bigint NOT NULL,
    active_at   bigint NOT NULL,
    due_at      bigint,
    lease_until bigint,
    parent_seq  bigint,
    talk        bigint NOT NULL, -- stands for tenant, user and hash
    tenant      text COLLATE "C" NOT NULL,
    session     text COLLATE "C" NOT NULL,
    "user"      text COLLATE "C" NOT NULL,
    status      text COLLATE "C" NOT NULL,
    hash        bytea NOT NULL,
    assistant   text COLLATE "C",
    thread      text COLLATE "C",
    parent      text COLLATE "C",
    parent_mark text COLLATE "C",
    title       text COLLATE "C" NOT NULL,
    labels      text[] COLLATE "C", -- NULL for none, which keeps most cards out of the index
    card        text COLLATE "C" NOT NULL,
    PRIMARY KEY (tenant, session)
) WITH (
    fillfactor = 70, -- every commit rewrites its card: room for the new one beside the old one
    autovacuum_vacuum_scale_factor = 0.02 -- and leaves the old one in the indexes: a small table, vacuumed often
);

-- Lists are in the order of active_at, which every commit changes. The indexes have it in slots of about a minute
-- (2^26 microseconds): equal entries are folded into one, which halves what a busy session leaves in them. A list
-- sorts the few sessions of a slot itself.
--
-- The condition is always true, and only lists say it. Without it, a server that has no statistics yet may well look
-- for one session by these indexes, through all sessions of its tenant, and keep that plan.
CREATE INDEX tenure_head_user ON tenure_head (tenant, "user", (active_at >> 26)) WHERE first > 0;
CREATE INDEX tenure_head_tenant ON tenure_head (tenant, (active_at >> 26)) WHERE first > 0;
CREATE INDEX tenure_head_labels ON tenure_head USING gin (labels) WHERE labels IS NOT NULL;
CREATE INDEX tenure_head_parent ON tenure_head (tenant, parent) WHERE parent IS NOT NULL;
CREATE INDEX tenure_head_due ON tenure_head (due_at) WHERE due_at IS NOT NULL;
CREATE INDEX tenure_head_lease ON tenure_head (lease_until) WHERE lease_until IS NOT NULL;
CREATE INDEX tenure_head_status ON tenure_head (status) WHERE status <> 'active'; -- to count by
-- Its beginning only, because a thread's name may be longer than a B-tree takes.
CREATE INDEX tenure_head_thread ON tenure_head (left(thread, 200)) WHERE thread IS NOT NULL;
-- For conversations. The hash changes with each turn, and leaves an entry behind: it is kept as small as can be.
CREATE INDEX tenure_head_talk ON tenure_head (talk);

-- The log. `entry` is text, never jsonb, which refuses \u0000, rewrites numbers and loses the order of keys. Its
-- storage is left at EXTENDED: a row below 2 kB stays as it is, beyond that the text is compressed.
CREATE TABLE tenure_record (
    seq     bigint NOT NULL,
    at      bigint NOT NULL,
    sum     int NOT NULL, -- the 32 bits of the checksum, with a sign
    tenant  text COLLATE "C" NOT NULL,
    session text COLLATE "C" NOT NULL,
    entry   text COLLATE "C" NOT NULL,
    PRIMARY KEY (tenant, session, seq)
);

-- Keyed values. `words` are the words of `text`, as the library splits and folds them.
CREATE TABLE tenure_item (
    created_at bigint NOT NULL,
    used_at    bigint NOT NULL,
    uses       bigint NOT NULL,
    expires_at bigint,
    tenant     text COLLATE "C" NOT NULL,
    owner      text COLLATE "C" NOT NULL,
    shelf      text COLLATE "C" NOT NULL,
    key        text COLLATE "C" NOT NULL,
    value      text COLLATE "C" NOT NULL,
    text       text COLLATE "C",
    words      tsvector,
    PRIMARY KEY (tenant, owner, shelf, key)
) WITH (fillfactor = 90); -- marks of use stay on their page

CREATE INDEX tenure_item_words ON tenure_item USING gin (words) WHERE words IS NOT NULL;
CREATE INDEX tenure_item_expiry ON tenure_item (expires_at) WHERE expires_at IS NOT NULL;

-- Media, once per tenant.
CREATE TABLE tenure_blob (
    tenant text COLLATE "C" NOT NULL,
    id     bytea NOT NULL,
    bytes  bytea NOT NULL,
    PRIMARY KEY (tenant, id)
);
-- Media are compressed already.
ALTER TABLE tenure_blob ALTER COLUMN bytes SET STORAGE EXTERNAL;

-- Which session needs which media, and from which record on. The reference settles the race between a commit that
-- begins to use a blob and a purge that removes it: one of the two fails and is repeated.
CREATE TABLE tenure_blob_use (
    first   bigint NOT NULL,
    tenant  text COLLATE "C" NOT NULL,
    session text COLLATE "C" NOT NULL,
    blob    bytea NOT NULL,
    PRIMARY KEY (tenant, session, blob),
    FOREIGN KEY (tenant, blob) REFERENCES tenure_blob (tenant, id)
);
CREATE INDEX tenure_blob_use_blob ON tenure_blob_use (blob, tenant);

-- Views for people: live sessions only (active, paused). Written so that conditions on tenant and session reach the
-- tables: the ancestors of each session are looked up one by one, and every window is one session.
--
-- PostgreSQL stores JSON that has \u0000 somewhere, but refuses to look into it. What may have it (messages, the state
-- of a checkpoint) is therefore cut out as text: it is the last field of its entry, and its name can not be mistaken,
-- because a quote inside a string before it would have a backslash.

-- The whole log of each session: its own records, and those of its ancestors up to where the line left them.
CREATE VIEW tenure_log AS
SELECT h.tenant, h.session, r.seq, r.at, r.entry
FROM tenure_head h
CROSS JOIN LATERAL (
    WITH RECURSIVE line (session, upto, parent, parent_seq) AS (
        SELECT h.session, h.seq, h.parent, h.parent_seq
        UNION ALL
        SELECT p.session, least(l.upto, l.parent_seq), p.parent, p.parent_seq
        FROM line l JOIN tenure_head p ON p.tenant = h.tenant AND p.session = l.parent
    )
    SELECT session, upto FROM line
) line
JOIN tenure_record r ON r.tenant = h.tenant AND r.session = line.session AND r.seq <= line.upto
WHERE h.status IN ('active', 'paused');

-- What is in force of it: nothing that a later rewind cut off. `ord` is the number of messages before a record.
CREATE VIEW tenure_visible AS
SELECT tenant, session, seq, at, entry, is_message, is_checkpoint,
       count(*) FILTER (WHERE is_message) OVER (
           PARTITION BY tenant, session ORDER BY seq ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
       ) AS ord
FROM (
    SELECT l.*,
           starts_with(entry, '{"message":') AS is_message,
           starts_with(entry, '{"checkpoint":') AS is_checkpoint,
           min(CASE WHEN starts_with(entry, '{"rewound":') THEN (entry::json #>> '{rewound,to}')::bigint END)
               OVER (PARTITION BY tenant, session ORDER BY seq DESC) AS cut
    FROM tenure_log l
) log
WHERE cut IS NULL OR cut >= seq;

-- Checkpoints in force, taken apart.
CREATE VIEW tenure_checkpoint AS
SELECT tenant, session, seq, ord,
       timestamptz 'epoch' + at * interval '1 microsecond' AS created_at,
       CASE WHEN cut = 0 THEN entry ELSE left(entry, cut - 1) || '}}' END::json -> 'checkpoint' AS fields,
       CASE WHEN cut = 0 THEN '{}' ELSE substr(entry, cut + 9, length(entry) - cut - 10) END::json AS state
FROM (SELECT *, strpos(entry, ',"state":{') AS cut FROM tenure_visible WHERE is_checkpoint) c;

-- In the information about a session, a \u0000 is shown as \ufffd.
CREATE VIEW sessions AS
SELECT session AS session_id,
       card -> 'info' AS info_json,
       (card #>> '{info,updated_at}')::timestamptz AS updated_at,
       tenant
FROM (
    SELECT tenant, session,
           CASE WHEN strpos(card, '\u0000') = 0 THEN card
                ELSE regexp_replace(card, '(?<!\\)((?:\\\\)*)\\u0000', '\1\\ufffd', 'g') END::json AS card
    FROM tenure_head
    WHERE status IN ('active', 'paused')
) head;

CREATE VIEW messages AS
SELECT session AS session_id, ord, substr(entry, cut + 7, length(entry) - cut - 8)::json AS message_json, tenant
FROM (SELECT *, strpos(entry, '"body":') AS cut FROM tenure_visible WHERE is_message) message;

CREATE VIEW checkpoints AS
SELECT session AS session_id,
       fields ->> 'label' AS label,
       ord AS position,
       created_at,
       coalesce((fields ->> 'auto')::boolean, false) AS auto,
       tenant
FROM tenure_checkpoint;

-- A checkpoint with all that it stands for. A checkpoint in force was never cut off, and nor was anything before it
-- since: the messages before it now are the messages before it then.
CREATE VIEW workflow_checkpoints AS
SELECT md5(tenant || '/' || session || '/' || seq)::uuid AS id,
       session AS session_id,
       fields ->> 'run' AS run_id,
       json_build_object(
           'messages', coalesce(
               (SELECT json_agg(m.message_json ORDER BY m.ord) FROM messages m
                WHERE m.tenant = c.tenant AND m.session_id = c.session AND m.ord < c.ord),
               '[]'::json),
           'state', state,
           'label', fields -> 'label',
           'position', ord
       ) AS state,
       least((fields ->> 'step')::numeric, 2147483647)::int AS step_index,
       created_at,
       created_at AS updated_at,
       tenant
FROM tenure_checkpoint c;
