//! Function words of the languages that have a stemmer or occur often: articles, pronouns, prepositions,
//! auxiliary verbs and question words. They carry no content, and which of them a text contains tells its
//! language.

use crate::rules::text::words;
use rust_stemmers::Algorithm;
use std::collections::{HashMap, HashSet};
use std::sync::LazyLock;

/// A language: its stemmer, if there is one, and its function words.
pub(crate) struct Language {
    pub algorithm: Option<Algorithm>,
    pub stop_words: HashSet<String>,
}

/// English, the language of a text in Latin script that no function word assigns to another one.
pub(crate) const ENGLISH: usize = 0;

/// The lists as written, with accents. The order is fixed: the first language wins a tie.
const LISTS: &[(Option<Algorithm>, &str)] = &[
    (
        Some(Algorithm::English),
        "a an the this that these those and or but if then than so as of at by for with about to from in on off up \
        down out over under into onto is am are was were be been being do does did doing done have has had having \
        i me my mine myself you your yours yourself he him his himself she her hers herself it its itself we us our \
        ours they them their theirs what which who whom whose when where why how there here not no nor can could \
        will would shall should might must just also too very s t d ll m re ve",
    ),
    (
        Some(Algorithm::German),
        "der die das den dem des ein eine einen einem einer eines und oder aber wenn dann als wie so zu zum zur von \
        vom bei mit nach aus an am auf in im ins für über unter um ist bin bist sind war waren sein hat habe haben \
        hatte wird werden wurde kann können soll ich mich mir mein meine meinen meinem meiner du dich dir dein deine \
        er ihn ihm sein seine seinen sie ihr ihre ihren ihrem ihrer es wir uns unser unsere was welche welcher \
        welches wer wen wem wann wo warum wieso nicht kein keine auch nur noch sich denn",
    ),
    (
        Some(Algorithm::French),
        "le la les l un une des du de d et ou mais si que qui quoi quel quelle quels quelles quand où comment \
        pourquoi combien est es suis sont était être a ai as ont avait avoir fait je j me m moi mon ma mes tu te t \
        ton ta tes il elle lui son sa ses on nous notre nos vous votre vos ils elles leur leurs ce c cet cette ces \
        à au aux en dans par pour sur sous avec sans chez vers entre ne n pas plus ni se s y qu",
    ),
    (
        Some(Algorithm::Spanish),
        "el la los las lo un una unos unas de del y o u e pero si que qué quién quiénes cuál cuáles cuándo dónde \
        cómo cuánto cuántos cuánta por para con sin a al en sobre entre hasta desde es son era eran ser soy está \
        están estoy fue ha han he había tiene yo me mi mis mí tú te tu tus él ella le les se su sus nos nuestro \
        nuestra vosotros ellos ellas esto este esta ese esa no ni ya como más porque cual",
    ),
    (
        Some(Algorithm::Italian),
        "il lo la i gli le l un uno una di del dello della dei degli delle e ed o ma se che chi cosa quale quali \
        quando dove come perché quanto quanti a al allo alla ai agli alle da dal dalla in nel nella nei con su sul \
        sulla per tra fra è sono era erano essere ha ho hanno aveva avere io mi me mio mia miei mie tu ti tuo tua \
        lui lei suo sua suoi sue noi ci nostro vi si non né anche più questo questa qual dov",
    ),
    (
        Some(Algorithm::Portuguese),
        "o a os as um uma uns umas de do da dos das e ou mas se que quem qual quais quando onde como porquê porque \
        quanto quantos por pelo pela para com sem em no na nos nas num numa sobre entre até desde é são era eram ser \
        sou está estão foi há tem têm eu me mim meu minha meus minhas tu te teu tua você ele ela seu sua seus suas \
        nós nosso eles elas isto este esta esse essa não nem já mais ao aos à",
    ),
    (
        Some(Algorithm::Dutch),
        "de het een en of maar als dan dat die dit deze wat wie welke welk wanneer waar waarom hoe hoeveel van voor \
        met naar bij uit aan op in om te tot door over onder is ben bent zijn was waren heeft heb hebben had wordt \
        worden kan kunnen ik mij me mijn jij je jou jouw hij hem haar zij ze hun wij we ons onze u uw er niet geen \
        ook nog zich",
    ),
    (
        Some(Algorithm::Swedish),
        "en ett den det de dem och eller men om så att som vad vem vilken vilket vilka när var varför hur för med \
        till från av på i under över är var vara har hade blir kan ska jag mig min mitt mina du dig din ditt dina \
        han honom hans hon henne hennes vi oss vår vårt våra ni er sin sitt sina inte ingen inget inga också bara \
        denna detta",
    ),
    (
        Some(Algorithm::Danish),
        "en et den det de dem og eller men hvis så at som hvad hvem hvilken hvilket hvilke hvornår hvor hvorfor \
        hvordan for med til fra af på i under over er var være har havde bliver kan skal jeg mig min mit mine du dig \
        din dit dine han ham hans hun hende hendes vi os vores i jer sin sit sine ikke ingen også kun denne dette",
    ),
    (
        Some(Algorithm::Norwegian),
        "en ei et den det de dem og eller men hvis så at som hva hvem hvilken hvilket hvilke når hvor hvorfor \
        hvordan for med til fra av på i under over er var være har hadde blir kan skal jeg meg min mitt mine du deg \
        din ditt dine han ham hans hun henne hennes vi oss vår vårt våre dere sin sitt sine ikke ingen også bare \
        denne dette",
    ),
    (
        Some(Algorithm::Finnish),
        "ja tai mutta jos niin kuin että joka mikä mitä kuka ketä milloin missä mistä mihin miksi miten kuinka on \
        ovat oli olivat olla olen hän häntä hänen hänellä minä minun minua minulla sinä sinun me meidän te teidän he \
        heidän se sen tämä tämän ei en et eivät myös vain",
    ),
    (
        Some(Algorithm::Hungarian),
        "a az egy és vagy de ha akkor hogy mint mi mit ki kit melyik mikor hol hova honnan miért hogyan van vannak \
        volt voltak lesz én engem az ő őt mi ti ők ez ezt azt nem ne is csak meg el",
    ),
    (
        Some(Algorithm::Romanian),
        "un o unui unei și sau dar dacă că ca ce cine care când unde cum de la în din pe cu fără pentru prin este e \
        sunt era eram fi am ai are au avea eu mă meu mea tu te tău ta el ea lui ei îl noi nostru voi ele nu nici mai \
        al ale",
    ),
    (
        Some(Algorithm::Turkish),
        "bir ve veya ya da de ama eğer ise ki ne kim hangi nerede nereye nereden neden niçin nasıl kaç için ile gibi \
        kadar bu şu o ben beni bana benim sen seni senin onu ona onun biz bizim siz sizin onlar mı mi mu mü değil çok \
        daha en var yok",
    ),
    (
        None, // Polish
        "i w z na do o u od po za przez dla przy nad pod bez oraz lub albo ale jeśli że który która które kto co jaki \
        jaka jakie kiedy gdzie dlaczego jak ile jest są był była było być ma mają ja mnie mi mój moja moje ty ciebie \
        twój on jego mu jej ona ono my nas nasz wy oni ich się nie też tylko już to ten ta te",
    ),
    (
        None, // Czech
        "a i v ve z ze na do o u od po za pro při nad pod bez nebo ale jestli že který která které kdo co jaký jaká \
        kdy kde proč jak kolik je jsou byl byla bylo být má mají já mě mi můj moje ty tě tvůj on jeho mu její ona my \
        nás náš vy oni jejich se si ne není také jen už to ten ta te",
    ),
    (
        Some(Algorithm::Russian),
        "и в во на с со к ко по о об от до за из у для при над под без или но а если что чтобы кто какой какая какие \
        какое когда где куда откуда почему зачем как сколько это этот эта эти тот та те есть был была было были быть \
        я меня мне мой моя моё мои ты тебя твой он его ему она её ей мы нас наш вы вас ваш они их им не ни же ли бы \
        тоже только уже",
    ),
    (
        Some(Algorithm::Greek),
        "ο η το οι τα του της των τον την ένας μια ένα και ή αλλά αν ότι που ποιος ποια ποιο ποιοι πότε πού γιατί πώς \
        πόσο πόσα τι σε στο στη στην στον στα στις από με για χωρίς είναι ήταν είμαι έχει έχω έχουν εγώ εμένα μου εσύ \
        σου αυτός αυτή αυτό εμείς μας εσείς σας αυτοί τους δεν να θα κι",
    ),
    (
        Some(Algorithm::Arabic),
        "في من إلى على عن مع بين هو هي هم أنا أنت نحن هذا هذه ذلك تلك التي الذي ما ماذا من متى أين كيف لماذا كم هل \
        كان كانت يكون لا لم لن ليس أو و ثم أن إن قد كل أي",
    ),
    (
        None, // Hindi
        "का की के को में से पर है हैं था थी थे हो और या लेकिन अगर कि जो क्या कौन कब कहाँ क्यों कैसे कितना कितने किस \
        यह वह ये वे मैं मुझे मेरा मेरी मेरे तुम आप आपका उसका उसकी उसके उसे इस उस नहीं भी ही तक लिए साथ ने",
    ),
];

/// All languages, in a fixed order.
pub(crate) static LANGUAGES: LazyLock<Vec<Language>> = LazyLock::new(|| {
    let language = |(algorithm, list): &(Option<Algorithm>, &str)| Language {
        algorithm: *algorithm,
        stop_words: words(list).into_iter().collect(),
    };
    LISTS.iter().map(language).collect()
});

/// For each function word, the languages that it occurs in, as a bit mask.
static LANGUAGES_BY_WORD: LazyLock<HashMap<&'static str, u32>> = LazyLock::new(|| {
    let mut by_word = HashMap::new();
    for (i, language) in LANGUAGES.iter().enumerate() {
        for word in &language.stop_words {
            *by_word.entry(word.as_str()).or_default() |= 1 << i;
        }
    }
    by_word
});

/// The language of a text, by the function words in it; then by the script of its letters.
pub(crate) fn detect(words: &[String]) -> usize {
    let mut counts = vec![0; LANGUAGES.len()];
    for mask in words.iter().filter_map(|word| LANGUAGES_BY_WORD.get(word.as_str())) {
        counts.iter_mut().enumerate().for_each(|(i, count)| *count += (mask >> i) & 1);
    }
    let best = counts.iter().enumerate().rev().max_by_key(|(_, count)| **count);
    match best {
        Some((language, count)) if *count > 0 => language,
        _ => by_script(words),
    }
}

/// The language that the first letter outside of ASCII suggests.
fn by_script(words: &[String]) -> usize {
    let stemmer = match words.iter().flat_map(|word| word.chars()).find(|c| !c.is_ascii()) {
        Some('\u{370}'..='\u{3ff}') => Algorithm::Greek,
        Some('\u{400}'..='\u{4ff}') => Algorithm::Russian,
        Some('\u{600}'..='\u{6ff}') => Algorithm::Arabic,
        _ => return ENGLISH,
    };
    let has_stemmer = |language: &Language| language.algorithm == Some(stemmer);
    LANGUAGES.iter().position(has_stemmer).unwrap_or(ENGLISH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_language_is_known_by_its_function_words_or_its_script() {
        let is = |text: &str, algorithm: Algorithm| {
            assert_eq!(LANGUAGES[detect(&words(text))].algorithm, Some(algorithm), "{text}");
        };
        is("Where did she park the car?", Algorithm::English);
        is("Tokyo 2020", Algorithm::English);
        is("Wo hat sie das Auto geparkt?", Algorithm::German);
        is("Où est-ce qu'elle a garé la voiture ?", Algorithm::French);
        is("¿Dónde ha aparcado el coche?", Algorithm::Spanish);
        is("Dove ha parcheggiato la macchina?", Algorithm::Italian);
        is("Onde é que ela estacionou o carro?", Algorithm::Portuguese);
        is("Waar heeft ze de auto geparkeerd?", Algorithm::Dutch);
        is("Var har hon parkerat bilen?", Algorithm::Swedish);
        is("Где она припарковала машину?", Algorithm::Russian);
        is("машина", Algorithm::Russian);
        is("αυτοκίνητο", Algorithm::Greek);
        is("سيارة", Algorithm::Arabic);
    }
}
