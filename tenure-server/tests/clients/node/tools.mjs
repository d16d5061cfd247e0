// The two tools that every client offers the model.
export const locate = ({ person }) => "Bern";
export const forecast = ({ day }) => ({ today: "rain today", tomorrow: "sun tomorrow" })[day];
