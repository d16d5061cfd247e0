-- The sessions of a tenant that have a label (a tag, a metadata field, an open review …), so that a filter reads the sessions
-- that match and not all of them, nor those of other tenants with the same label. A trigger keeps it equal to
-- tenure_head.labels: nodes of the version before keep it too, and an append that leaves the labels as they are writes
-- nothing here.
CREATE TABLE tenure_label (
    tenant  text COLLATE "C" NOT NULL,
    label   text COLLATE "C" NOT NULL,
    session text COLLATE "C" NOT NULL,
    PRIMARY KEY (tenant, label, session)
);

CREATE FUNCTION tenure_label_sync() RETURNS trigger LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    IF TG_OP <> 'INSERT' AND OLD.labels IS NOT NULL THEN
        DELETE FROM tenure_label WHERE tenant = OLD.tenant AND label = ANY(OLD.labels) AND session = OLD.session;
    END IF;
    IF TG_OP <> 'DELETE' AND NEW.labels IS NOT NULL THEN
        INSERT INTO tenure_label (tenant, label, session)
            SELECT NEW.tenant, label, NEW.session FROM unnest(NEW.labels) AS label ON CONFLICT DO NOTHING;
    END IF;
    RETURN NULL;
END
$$;

CREATE TRIGGER tenure_label_insert AFTER INSERT ON tenure_head
    FOR EACH ROW WHEN (NEW.labels IS NOT NULL) EXECUTE FUNCTION tenure_label_sync();
CREATE TRIGGER tenure_label_update AFTER UPDATE OF labels ON tenure_head
    FOR EACH ROW WHEN (OLD.labels IS DISTINCT FROM NEW.labels) EXECUTE FUNCTION tenure_label_sync();
CREATE TRIGGER tenure_label_delete AFTER DELETE ON tenure_head
    FOR EACH ROW WHEN (OLD.labels IS NOT NULL) EXECUTE FUNCTION tenure_label_sync();

-- The triggers are there: creating them waited for writers, and from here on each change is written twice.
INSERT INTO tenure_label (tenant, label, session)
    SELECT tenant, label, session FROM tenure_head, unnest(labels) AS label ON CONFLICT DO NOTHING;
